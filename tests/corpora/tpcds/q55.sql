-- A manager's brands in another month.
select i_brand_id as brand_id, i_brand as brand, sum(ss_ext_sales_price) as ext_price
from store_sales
join date_dim on d_date_sk = ss_sold_date_sk
join item on i_item_sk = ss_item_sk
where i_manager_id = 28 and d_moy = 11 and d_year = 1999
group by i_brand, i_brand_id
order by ext_price desc, brand_id, brand
limit 100
