-- Web sales by place: a list OR a subquery.
select ca_zip, ca_city, sum(ws_sales_price) as price
from web_sales
join customer on c_customer_sk = ws_bill_customer_sk
join customer_address on ca_address_sk = c_current_addr_sk
join date_dim on d_date_sk = ws_sold_date_sk
join item on i_item_sk = ws_item_sk
where (
    substr(ca_zip, 1, 5) in (
      '85669', '86197', '88274', '83405', '86475', '85392', '85460', '80348', '81792')
    or i_item_id in (
      select i_item_id from item where i_item_sk in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29))
  )
  and d_qoy = 2 and d_year = 2001
group by ca_zip, ca_city
order by ca_zip, ca_city, price
limit 100
