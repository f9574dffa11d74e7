-- Catalog sales by zip: a disjunction over three tables.
select ca_zip, sum(cs_sales_price) as price
from catalog_sales
join customer on c_customer_sk = cs_bill_customer_sk
join customer_address on ca_address_sk = c_current_addr_sk
join date_dim on d_date_sk = cs_sold_date_sk
where (
    substr(ca_zip, 1, 5) in (
      '85669', '86197', '88274', '83405', '86475', '85392', '85460', '80348', '81792')
    or ca_state in ('CA', 'WA', 'GA')
    or cs_sales_price > 500
  )
  and d_qoy = 2 and d_year = 2001
group by ca_zip
order by ca_zip, price
limit 100
